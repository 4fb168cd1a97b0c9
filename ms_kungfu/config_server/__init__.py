"""The config server holds the desired cluster of a job: a store and its HTTP server (client: `cluster_store`)."""
