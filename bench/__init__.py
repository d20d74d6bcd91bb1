"""The load generator: workloads against any OpenAI-compatible server, and the same work on several engines in one sitting."""
