"""Token dispatchers, one file each."""
