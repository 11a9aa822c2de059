"""Dense linears in any stored format, under the same contract as the expert layer's backends."""
