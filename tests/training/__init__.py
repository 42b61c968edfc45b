"""What the tests of training share: a step's batch by hand."""
