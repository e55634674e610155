// Reads the page again while something runs. Without it, <noscript> does.
(() => {
	document.querySelectorAll("main .calendar").forEach((e) => { e.parentElement.scrollLeft = e.scrollWidth; }); // to the newest dates
	let wait = Number(document.body.dataset.refresh);
	if (!wait) return;
	const look = async () => {
		if (!document.hidden) {
			try {
				const answer = await fetch(location.href, { credentials: "same-origin", headers: { Accept: "text/html" } });
				if (answer.ok) {
					const page = new DOMParser().parseFromString(await answer.text(), "text/html");
					const focused = document.activeElement && document.activeElement.getAttribute("href");
					const scrolled = [...document.querySelectorAll("main .wide")].map((e) => e.scrollLeft);
					document.querySelector("main").replaceWith(document.adoptNode(page.querySelector("main")));
					document.querySelectorAll("main .wide").forEach((e, n) => { e.scrollLeft = scrolled[n] || 0; });
					if (focused) {
						const again = [...document.querySelectorAll("main a")].find((a) => a.getAttribute("href") === focused);
						if (again) again.focus({ preventScroll: true });
					}
					wait = Number(page.body.dataset.refresh);
				}
			} catch { /* the next look tries again */ }
		}
		if (wait) setTimeout(look, wait * 1000);
	};
	setTimeout(look, wait * 1000);
})();
