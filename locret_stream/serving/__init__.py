"""An HTTP server in OpenAI's language: each session has an endless memory of fixed size.

`errors`, `names`, `bodies` and `app` load no torch. `service` does, when it starts.
"""
