"""HTTP routes, wire types, SSE, authentication and metrics."""
