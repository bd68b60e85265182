"""What is run around the project: `make` and `.ci/run` call it."""
