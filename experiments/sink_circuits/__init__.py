"""How do softmax1 and learned attention sinks change the circuits of a small GPT that is trained with them?"""
