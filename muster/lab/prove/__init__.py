"""Verdicts: cases, the judge and its mutants, isolated trials, and `muster verify`."""
