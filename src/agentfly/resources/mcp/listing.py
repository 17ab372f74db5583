"""Listing: all tools of a server, page by page."""

from __future__ import annotations

from mcp import Client, MCPError
from mcp.types import INVALID_PARAMS, Tool

MOST_PAGES = 10_000
"""Pages after which a list is taken for one that does not end. A server with fewer tools than that has fewer pages."""


class EndlessListing(Exception):
    """A list of tools that does not end. The message says why, and goes on from "it"."""


async def all_tools(client: Client) -> tuple[Tool, ...]:
    """All tools of a server, however many pages it lists them on.

    A cursor may be the empty text. Some servers mean by it that there is no further page: then that page cannot be had,
    or is the first one again.

    Raises:
        EndlessListing: a cursor comes back, or there are too many pages.
        Exception: as the client raises it.
    """
    if client.server_capabilities.tools is None:
        return ()
    page = await client.list_tools()
    tools = list(page.tools)
    cursors: set[str] = set()
    while (cursor := page.next_cursor) is not None:
        if cursor in cursors:
            raise EndlessListing(f"its list of tools does not end: the cursor {cursor[:100]!r} came back")
        if len(cursors) == MOST_PAGES:
            raise EndlessListing(f"its list of tools does not end: it has more than {MOST_PAGES} pages")
        cursors.add(cursor)
        try:
            page = await client.list_tools(cursor=cursor)
        except MCPError as error:
            if cursor or error.code != INVALID_PARAMS:
                raise
            break
        if not cursor and _adds_nothing(page.tools, tools):
            break
        tools += page.tools
    return tuple(tools)


def _adds_nothing(page: list[Tool], tools: list[Tool]) -> bool:
    known = {tool.name for tool in tools}
    return all(tool.name in known for tool in page)
