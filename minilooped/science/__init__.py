"""Measurements: the papers' theory, sweeps, probes, and the ledger of what the papers claim."""
