"""The config server, which stores a job's desired cluster and serves it over HTTP. `cluster_store` is the client."""
