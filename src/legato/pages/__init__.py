"""Static pages: report.html, comparisons, experiments. They read run directories and import nothing that a run names."""
