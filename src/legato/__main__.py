"""`python -m legato ...` is the command `legato ...`."""

from legato.cli.main import main

if __name__ == "__main__":
    main()
