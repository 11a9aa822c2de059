"""What the bits of a stored weight matrix mean: formats, scales, codecs and the dialects that write them to disk."""
