"""What the tests of policy, rollouts and training share: exact models and batches by hand."""
