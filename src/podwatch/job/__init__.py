"""How a job ends, what its earlier attempts mean for it, and how several nodes end together. Pure."""
