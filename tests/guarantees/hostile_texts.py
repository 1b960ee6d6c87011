"""Texts that pages and pictures have stumbled over: markup, mathematics, control characters, scripts."""

from __future__ import annotations

TEXTS = (
    # markup, in every place where a text may stand
    "<script>window.ran=1</script>",
    "</script><script>window.ran=2</script>",
    "</SCRIPT ><img src=x onerror=window.ran=3>",
    "<img src=x onerror=window.ran=4>",
    '"><svg onload=window.ran=5>',
    "' onmouseover='window.ran=6' x='",
    '" style="background:url(http://127.0.0.1:9/)" x="',
    "</title><meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "</text><a href='javascript:window.ran=7'>here</a><text>",
    "<iframe srcdoc='<script>window.ran=8</script>'></iframe>",
    "<!--",
    "--><script>window.ran=9</script><!--",
    "<!-- <script> --",
    "]]><b>bold</b>",
    "<![CDATA[<b>bold</b>]]>",
    "<?xml-stylesheet href='http://127.0.0.1:9/a.xsl'?>",
    "<!DOCTYPE a [<!ENTITY b 'c'>]>&b;",
    "&lt;b&gt;already escaped&lt;/b&gt; &amp;amp; &#60;script&#62;",
    "&" * 70 + "<" * 70,  # whose entities a break of lines could cut
    "__TITLE__ and __DATA__",  # the places of the template
    "{{7*7}} ${window.ran=10} `window.ran=11` <%= 7 %>",
    "\\u003c/script\\u003e \\x3cb\\x3e \\",
    "javascript:window.ran=12",
    # what matplotlib reads in a text
    "costs $5 or $6",
    r"$\frac{1}{0}$ and $\undefined{",
    "$$",
    "_hidden",
    r"\textbf{bold} % # ^ ~ {",
    # what cannot be printed
    "\x00\x07\x1b[31mred\x1b[0m\x7f",
    "\ud83d half, \udc00 half",
    "two\nlines\r\nand\x0bmore\x0cof\x85them\u2028all\u2029",
    "\t \u00a0 \u2003 blanks",
    "\u202eright to left\u202c \u2066isolated\u2069",
    "\ufeff\u200b\u00ad\ufffe\uffff nothing to be seen",
    # what must stay together
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 a family",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 in Persian",
    "\u0915\u094d\u200d\u0937 in Devanagari",
    "e\u0301\u0301\u0301 \u0301 \U0001f3f4\U000e0067\U000e007f",
    "words, " * 20 + "the end",
    "",
)
