"""What the router and a worker say to each other, as the worker's own types, and where they meet."""
