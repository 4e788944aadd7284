"""Answers to the exercises, right and wrong ones, a file for each chapter."""

from . import ch00, ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09, ch10, ch11

CHAPTERS = (ch00, ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09, ch10, ch11)

RIGHT = {checker: answer for chapter in CHAPTERS for checker, answer in chapter.RIGHT.items()}
WRONG = {checker: mistakes for chapter in CHAPTERS for checker, mistakes in chapter.WRONG.items()}
