"""Run the command `tricycle` (`python -m tricycle`); without arguments it prints the hardware and backend report."""

from tricycle_cli.main import MODULE, main

if __name__ == "__main__":
    main(MODULE)
