"""Command-line tools of the project; each file runs by itself."""
