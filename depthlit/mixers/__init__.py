"""Memory-lean arithmetic for mixtures over depth: autograd functions that keep little, and what they share."""
