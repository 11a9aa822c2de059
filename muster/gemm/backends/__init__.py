"""Linear backends, one file each."""
