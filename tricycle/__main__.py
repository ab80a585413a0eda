"""What this machine offers Tricycle and what is in use: python -m tricycle"""

from tricycle_cli.flags import run_main
from tricycle_cli.machine import main

if __name__ == "__main__":
    run_main(main)
