"""One writing job: its session, who keeps it alone, and transactions made of buffers, streams and parts of others."""
