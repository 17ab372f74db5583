"""Mate in two: endgames against Stockfish, with one engine per rollout, and a policy that knows the moves.

    python examples/chess_with_stockfish.py

It needs the program Stockfish (`apt install stockfish`) and the package `chess` (`pip install chess`), and no model:
the policy is scripted. Without the argument ``policy`` of `af.run`, the agent's model plays.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import chess
import chess.engine

import agentfly as af
from agentfly.core.errors import PrerequisiteError, ResourceDied

PATH = f"{os.environ.get('PATH', '')}:/usr/games"  # where Debian puts it


class Endgame:
    """A game of chess from a given position. The player who moves first plays against Stockfish."""

    def __init__(self, nodes: int) -> None:
        program = shutil.which("stockfish", path=PATH)
        if program is None:
            raise PrerequisiteError(
                "There is no Stockfish on this machine. On Debian and Ubuntu: apt install stockfish"
            )
        self.limit = chess.engine.Limit(nodes=nodes)
        self.stockfish = chess.engine.SimpleEngine.popen_uci(program)
        self.stockfish.configure({"Threads": 1, "Hash": 16})
        self.reset()

    def reset(self, position: str = chess.STARTING_FEN) -> str:
        self.board = chess.Board(position)
        self.colour = self.board.turn
        return str(self.board)

    def play(self, move: str) -> str:
        """Play a move, let Stockfish answer, and return the board. An illegal move raises a ValueError."""
        self.board.push_uci(move)
        if self.board.is_game_over():
            return f"The game is over: {self.board.result()}."
        try:
            answer = self.stockfish.play(self.board, self.limit).move
        except chess.engine.EngineTerminatedError as error:
            # This says that it was not the agent's fault: the rollout is not scored, and the instance is replaced.
            raise ResourceDied("Stockfish has ended.") from error
        assert answer is not None
        self.board.push(answer)
        return f"Stockfish plays {answer.uci()}." + (" The game is over." if self.board.is_game_over() else "")

    def moves(self) -> list[str]:
        return [move.uci() for move in self.board.move_stack]

    def has_won(self) -> bool:
        """Return whether the player who moved first has mated."""
        outcome = self.board.outcome()
        return outcome is not None and outcome.winner == self.colour

    def close(self) -> None:
        self.stockfish.quit()


# Each game lives in a process of its own, and what it starts ends with it, whatever happens.
GAME = af.EnvironmentSpec(factory=Endgame, kwargs={"nodes": 2_000}, runs="process", capacity=8, memory="512MiB")


async def set_up(game: Any, context: af.Context) -> None:
    await game.reset(context.task["position"])


@af.tool
async def move(uci: str, context: af.Context) -> af.ToolResult:
    """Play a move.

    Args:
        uci: the move in UCI notation, such as e2e4.
    """
    game = await context.acquire(GAME, prepare=set_up)  # the same game in every turn of this rollout
    seen = await game.play(uci)
    return af.ToolResult(seen, done="over" in seen, info={"moves": await game.moves()})


@af.reward
async def mated(context: af.Context) -> float:
    """1 for a mate, else 0."""
    game = await context.acquire(GAME, prepare=set_up)
    return float(await game.has_won())


AGENT = af.Agent(model="tiny", tools=[move], system_prompt="You play White. Mate in two.", max_turns=3)

# Positions in which White mates in two whatever Black does, and how.
ENDGAMES = {
    "7k/8/8/8/8/8/R7/1R4K1 w - - 0 1": ("a2a7", "b1b8"),
    "k7/8/8/8/8/8/7R/6RK w - - 0 1": ("h2h7", "g1g8"),
}


def know(conversation: str, turn: int) -> str:
    """The scripted policy: what a perfect player writes."""
    solution = next(moves for position, moves in ENDGAMES.items() if position in conversation)
    return AGENT.format.write("move", {"uci": solution[turn]})


async def main() -> None:
    tasks = [af.Task(f"The position is {position}.", {"position": position}) for position in ENDGAMES]
    result = await af.run(AGENT, tasks, reward=mated, attempts=4, policy=af.ScriptedPolicy(know))
    for trajectory in result.trajectories:
        played = trajectory.turns[-1].tool_results[-1].info["moves"]
        print(f"{trajectory.task['position'].split()[0]}: {' '.join(played)} -> {trajectory.reward}")
    print(f"mean reward {result.metrics['reward/mean']:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
