"""The command `tricycle`: a module for each subcommand, and modules that subcommands share."""
