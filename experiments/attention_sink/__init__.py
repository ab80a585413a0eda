"""Where does SmolLM2 make its attention sink, and what happens without it?"""
