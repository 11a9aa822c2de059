"""What a model is on disk: spec, index, names, what is stored how, loader, writer."""
