"""Members found, checked, recognised; foreign content refused."""
