"""Other engines behind the smallest HTTP server that the load generator can drive."""
