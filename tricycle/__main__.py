"""The command line: `python -m tricycle train`, and so on; alone it says what this machine offers Tricycle."""

from tricycle_cli.main import MODULE, main

if __name__ == "__main__":
    main(MODULE)
