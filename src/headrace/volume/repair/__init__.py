"""Second readers: what verifies, what is damaged, what can still be saved."""
