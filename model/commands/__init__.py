"""Commands, one module each: ``add_parser`` declares the flags, a handler runs the command."""
