"""The HTTP server on many machines, with Ray Serve: `memory` holds sessions, `front` speaks HTTP and knows none,
`router` says which replica a session's requests go to, `scaling` how many there are; `cluster` puts them together.
Nothing but `front`, `router`, `cluster` and `starting` knows Ray."""
