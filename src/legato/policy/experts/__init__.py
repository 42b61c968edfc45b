"""Mixtures of experts: finding routers, recording, replaying and balancing them."""
