"""Elastic runs: workers of local steps that come, leave and die; the roll, and ways of meeting."""
