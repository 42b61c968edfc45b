"""What every metric means, and how it is measured from what an objective decided."""
