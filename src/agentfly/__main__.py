"""``python -m agentfly``: the ``agentfly`` command."""

from __future__ import annotations

if __name__ == "__main__":
    from agentfly.cli.main import main

    main()
