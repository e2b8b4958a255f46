"""The trainers that a scenario can name with plain PyTorch, a module each: whose loop runs, with its habits."""
