"""One module a command: ``add_parser`` declares its flags, its handler runs it."""
