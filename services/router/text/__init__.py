"""Text to token ids and back. Torch-free; knows neither HTTP nor workers.

in    texts and chats   tokenizer.py, chat_template.py ──> token ids, each of them in the model's vocabulary
out   token ids         detokenizer.py (token to text) ──> stops.py (may it be shown, does it end here) ──> choice.py (one output)
      logprobs          logprobs.py writes them in the shapes of the two APIs, with the token strings of vocabulary.py

`ChatTokenizer` (tokenizer.py) holds what is loaded once per model, loading.py loads it; a `ChoiceText` (choice.py) holds the state
of one output.
"""
