"""One server for several models, each in processes of its own while it is loaded."""
