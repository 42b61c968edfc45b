"""Intervals, comparisons over seeds, and how log-ratios vary with length."""
