"""Experts for some of TextArena's games, which play demonstrations and can be opponents.

An expert reads the game's state object, not the text that a player gets. It uses no information that is hidden from the
player, such as the number to guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, reduce
from itertools import permutations, product
from operator import xor
from typing import Any

EXPERT_GAMES = ("GuessTheNumberEnv", "TowerOfHanoiEnv", "MastermindEnv", "NimEnv", "TicTacToeEnv")
"""Class names of the TextArena environments for which `legal_moves` and `best_move` work."""

_ROWS = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def legal_moves(game: Any) -> list[str]:
    """Return all moves, such as ``[3]``, that are legal in the current state of one of the `EXPERT_GAMES`.

    Moves that repeat an earlier guess are left out. ``game`` is TextArena's environment without wrappers.
    """
    state = game.state.game_state
    match type(game).__name__:
        case "GuessTheNumberEnv":
            numbers = range(game.min_number, game.max_number + 1)
            return [f"[{number}]" for number in numbers if number not in game.guessed_numbers]
        case "TowerOfHanoiEnv":
            top = {name: disks[-1] if disks else 1000 for name, disks in state["towers"].items()}
            return [f"[{a} {b}]" for a, b in permutations("ABC", 2) if top[a] < top[b]]
        case "MastermindEnv":
            tried = {tuple(entry["guess"]) for entry in state["history"]}
            return [f"[{' '.join(map(str, code))}]" for code in _codes(state) if code not in tried]
        case "NimEnv":
            return [f"[{i} {n}]" for i, pile in enumerate(state["piles"]) for n in range(1, pile + 1)]
        case _:
            board = [cell for row in state["board"] for cell in row]
            return [f"[{i}]" for i, cell in enumerate(board) if not cell]


def best_move(game: Any, seat: int) -> str:
    """Return a move, such as ``[3]``, with which the player at ``seat`` plays well in one of the `EXPERT_GAMES`.

    ``game`` is TextArena's environment without wrappers. The move is optimal, except that Mastermind may take more
    guesses than necessary.
    """
    state = game.state.game_state
    match type(game).__name__:
        case "GuessTheNumberEnv":  # halve the range of possible numbers
            low, high = game.min_number, game.max_number
            for number, hint in state["guess_history"]:
                if hint == "higher":
                    low = max(low, number + 1)
                else:
                    high = min(high, number - 1)
            return f"[{(low + high) // 2}]"
        case "TowerOfHanoiEnv":  # the next move of the shortest solution, from any position
            tower_of = {disk: tower for tower, disks in state["towers"].items() for disk in disks}
            goal, move = "C", ""
            for disk in sorted(tower_of, reverse=True):
                source = tower_of[disk]
                if source != goal:
                    move = f"[{source} {goal}]"
                    (goal,) = {"A", "B", "C"} - {source, goal}  # all smaller disks must be out of the way first
            return move
        case "MastermindEnv":  # the first code that agrees with all answers so far
            answers = [(tuple(e["guess"]), (e["black"], e["white"])) for e in state["history"]]
            code = next(code for code in _codes(state) if all(_pegs(guess, code) == pegs for guess, pegs in answers))
            return f"[{' '.join(map(str, code))}]"
        case "NimEnv":  # leave piles whose exclusive or is zero; if no move does, take one item of the largest pile
            piles = state["piles"]
            total = reduce(xor, piles)
            for index, pile in enumerate(piles):
                if pile ^ total < pile:
                    return f"[{index} {pile - (pile ^ total)}]"
            return f"[{piles.index(max(piles))} 1]"
        case _:  # TicTacToe: search the whole game tree
            mine, other = ("X", "O") if seat == 1 else ("O", "X")
            board = tuple(cell for row in state["board"] for cell in row)
            best, best_value = -1, -100
            for index in range(9):
                if not board[index]:
                    value = -_position_value((*board[:index], mine, *board[index + 1 :]), other)
                    if value > best_value:
                        best, best_value = index, value
            return f"[{best}]"


def _codes(state: Any) -> Iterator[tuple[int, ...]]:
    """Return all codes that can be the secret code of a Mastermind game with this state."""
    numbers, length = range(1, state["num_numbers"] + 1), state["code_length"]
    return product(numbers, repeat=length) if state["duplicate_numbers"] else permutations(numbers, length)


def _pegs(guess: Sequence[int], code: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of black and white pegs with which Mastermind answers ``guess`` if the secret is ``code``.

    A black peg is a correct number at the correct position, a white peg a correct number at another position.
    """
    exact = sum(a == b for a, b in zip(guess, code, strict=True))
    common = sum(min(guess.count(n), code.count(n)) for n in set(guess))
    return exact, common - exact


@cache
def _position_value(board: tuple[str, ...], mark: str) -> int:
    """Return the minimax value of a TicTacToe board for the player who moves next.

    ``mark`` is this player's symbol, "X" or "O".

    A win is positive, a loss negative and a draw 0. The absolute value is one plus the number of cells that are free at
    the end, so that an earlier win is better and an earlier loss is worse.
    """
    free = [i for i, cell in enumerate(board) if not cell]
    if any(board[a] and board[a] == board[b] == board[c] for a, b, c in _ROWS):
        return -1 - len(free)  # the other player has just won
    if not free:
        return 0
    other = "O" if mark == "X" else "X"
    return max(-_position_value((*board[:i], mark, *board[i + 1 :]), other) for i in free)
