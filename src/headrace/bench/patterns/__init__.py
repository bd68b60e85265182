"""What training does to storage, one file a pattern: `run(place, options, tell) -> Outcome` is one round of it."""
