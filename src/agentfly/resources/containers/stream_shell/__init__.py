"""The shell of a sandbox to which streams alone lead.

On this side: shell, channels, channel. Inside: keeper.sh, which has the others carried out.
"""
