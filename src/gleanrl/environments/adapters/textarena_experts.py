"""Experts of some of TextArena's games, for warm starts and as an upper bound. They look at the game's own state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import permutations, product
from operator import xor
from typing import Any


@dataclass(frozen=True, slots=True)
class Expert:
    """Of the games of one class: the moves that are allowed, and the best of them."""

    moves: Callable[[Any, int], Sequence[str]]
    best: Callable[[Any, int], str]


# --- GuessTheNumber: halve what is left ---------------------------------------------------------------
def _open_numbers(game: Any, seat: int) -> list[int]:
    return [n for n in range(game.min_number, game.max_number + 1) if n not in game.guessed_numbers]


def _guess(game: Any, seat: int) -> str:
    low, high = game.min_number, game.max_number
    for number, hint in game.state.game_state["guess_history"]:
        low, high = (max(low, number + 1), high) if hint == "higher" else (low, min(high, number - 1))
    return f"[{(low + high) // 2}]"


# --- TowerOfHanoi: from any position --------------------------------------------------------------------
def _disk_moves(game: Any, seat: int) -> list[str]:
    towers = game.state.game_state["towers"]
    top = {name: disks[-1] if disks else 1000 for name, disks in towers.items()}
    return [f"[{a} {b}]" for a, b in permutations("ABC", 2) if top[a] < top[b]]


def _hanoi(game: Any, seat: int) -> str:
    at = {disk: tower for tower, disks in game.state.game_state["towers"].items() for disk in disks}
    goal, move = "C", ""
    for disk in sorted(at, reverse=True):
        if at[disk] != goal:
            other = next(tower for tower in "ABC" if tower not in (at[disk], goal))
            move, goal = f"[{at[disk]} {goal}]", other  # all smaller ones must be out of the way first
    return move


# --- Mastermind: any code that agrees with all that was said --------------------------------------------
def _codes(game: Any) -> Iterator[tuple[int, ...]]:
    state = game.state.game_state
    numbers = range(1, state["num_numbers"] + 1)
    length = state["code_length"]
    return product(numbers, repeat=length) if state["duplicate_numbers"] else permutations(numbers, length)


def _pegs(guess: Sequence[int], code: Sequence[int]) -> tuple[int, int]:
    exact = sum(a == b for a, b in zip(guess, code, strict=True))
    common = sum(min(guess.count(n), code.count(n)) for n in set(guess))
    return exact, common - exact


def _code_moves(game: Any, seat: int) -> list[str]:
    tried = {tuple(entry["guess"]) for entry in game.state.game_state["history"]}
    return [f"[{' '.join(map(str, code))}]" for code in _codes(game) if code not in tried]


def _code(game: Any, seat: int) -> str:
    said = [(tuple(e["guess"]), (e["black"], e["white"])) for e in game.state.game_state["history"]]
    code = next(code for code in _codes(game) if all(_pegs(guess, code) == pegs for guess, pegs in said))
    return f"[{' '.join(map(str, code))}]"


# --- Nim: leave a sum of zero ---------------------------------------------------------------------------
def _nim_moves(game: Any, seat: int) -> list[str]:
    return [f"[{i} {n}]" for i, pile in enumerate(game.state.game_state["piles"]) for n in range(1, pile + 1)]


def _nim(game: Any, seat: int) -> str:
    piles = game.state.game_state["piles"]
    total = reduce(xor, piles)
    for index, pile in enumerate(piles):
        if pile ^ total < pile:
            return f"[{index} {pile - (pile ^ total)}]"
    return f"[{piles.index(max(piles))} 1]"


# --- TicTacToe: look at everything ----------------------------------------------------------------------
_LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def _cells(game: Any) -> list[str]:
    return [cell for row in game.state.game_state["board"] for cell in row]


def _cell_moves(game: Any, seat: int) -> list[str]:
    return [f"[{i}]" for i, cell in enumerate(_cells(game)) if not cell]


def _tic_tac_toe(game: Any, seat: int) -> str:
    mine = "X" if seat == 1 else "O"
    board = _cells(game)
    free = [i for i, cell in enumerate(board) if not cell]
    return f"[{max(free, key=lambda i: -_worth(_put(board, i, mine), 'O' if mine == 'X' else 'X'))}]"


def _put(board: Sequence[str], index: int, mark: str) -> tuple[str, ...]:
    return tuple(mark if i == index else cell for i, cell in enumerate(board))


@cache
def _worth(board: tuple[str, ...], mark: str) -> int:
    """What the position is worth to who moves now: the sooner it ends, the more it counts."""
    free = [i for i, cell in enumerate(board) if not cell]
    if any(board[a] and board[a] == board[b] == board[c] for a, b, c in _LINES):
        return -1 - len(free)  # the other one has just won
    if not free:
        return 0
    return max(-_worth(_put(board, i, mark), "O" if mark == "X" else "X") for i in free)


EXPERTS: Mapping[str, Expert] = {
    "GuessTheNumberEnv": Expert(lambda game, seat: [f"[{n}]" for n in _open_numbers(game, seat)], _guess),
    "TowerOfHanoiEnv": Expert(_disk_moves, _hanoi),
    "MastermindEnv": Expert(_code_moves, _code),
    "NimEnv": Expert(_nim_moves, _nim),
    "TicTacToeEnv": Expert(_cell_moves, _tic_tac_toe),
}
"""By the class of TextArena's environment."""
