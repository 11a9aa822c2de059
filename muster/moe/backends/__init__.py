"""Expert-layer backends, one file each."""
