"""OpenAI's Responses API over the same generation; nothing is kept between turns."""
