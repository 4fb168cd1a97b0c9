"""The config server holds a job's desired cluster: a store and its HTTP server (`cluster_store` is the client)."""
