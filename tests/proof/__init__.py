"""What the tests of objectives and advantages share: generated batches, the members, and the call into the package."""
