"""What every metric means, and how it is measured."""
