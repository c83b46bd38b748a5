"""Django's settings of a shop (Oscar) with a content management system (Wagtail); the database is at SHOP_PORT."""

import os

from oscar.defaults import *

SECRET_KEY, DEBUG, USE_TZ, TIME_ZONE, SITE_ID, ROOT_URLCONF = "of a test", False, True, "UTC", 1, "django.contrib.auth.urls"
DATABASES = {"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": "app", "USER": os.environ.get("SHOP_USER", "postgres"), "HOST": "127.0.0.1",
    "PORT": os.environ["SHOP_PORT"]}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions", "django.contrib.messages",
    "django.contrib.sites", "django.contrib.flatpages", "django.contrib.postgres", "oscar.config.Shop", "oscar.apps.analytics.apps.AnalyticsConfig",
    "oscar.apps.checkout.apps.CheckoutConfig", "oscar.apps.address.apps.AddressConfig", "oscar.apps.shipping.apps.ShippingConfig",
    "oscar.apps.catalogue.apps.CatalogueConfig", "oscar.apps.catalogue.reviews.apps.CatalogueReviewsConfig",
    "oscar.apps.communication.apps.CommunicationConfig", "oscar.apps.partner.apps.PartnerConfig", "oscar.apps.basket.apps.BasketConfig",
    "oscar.apps.payment.apps.PaymentConfig", "oscar.apps.offer.apps.OfferConfig", "oscar.apps.order.apps.OrderConfig",
    "oscar.apps.customer.apps.CustomerConfig", "oscar.apps.search.apps.SearchConfig", "oscar.apps.voucher.apps.VoucherConfig",
    "oscar.apps.wishlists.apps.WishlistsConfig", "oscar.apps.dashboard.apps.DashboardConfig",
    "oscar.apps.dashboard.reports.apps.ReportsDashboardConfig", "oscar.apps.dashboard.users.apps.UsersDashboardConfig",
    "oscar.apps.dashboard.orders.apps.OrdersDashboardConfig", "oscar.apps.dashboard.catalogue.apps.CatalogueDashboardConfig",
    "oscar.apps.dashboard.offers.apps.OffersDashboardConfig", "oscar.apps.dashboard.partners.apps.PartnersDashboardConfig",
    "oscar.apps.dashboard.pages.apps.PagesDashboardConfig", "oscar.apps.dashboard.ranges.apps.RangesDashboardConfig",
    "oscar.apps.dashboard.reviews.apps.ReviewsDashboardConfig", "oscar.apps.dashboard.vouchers.apps.VouchersDashboardConfig",
    "oscar.apps.dashboard.communications.apps.CommunicationsDashboardConfig", "oscar.apps.dashboard.shipping.apps.ShippingDashboardConfig",
    "widget_tweaks", "haystack", "treebeard", "django_tables2",
    "wagtail.contrib.forms", "wagtail.contrib.redirects", "wagtail.contrib.settings", "wagtail.embeds", "wagtail.sites", "wagtail.users",
    "wagtail.snippets", "wagtail.documents", "wagtail.images", "wagtail.search", "wagtail.admin", "wagtail", "modelcluster", "taggit"]
HAYSTACK_CONNECTIONS = {"default": {"ENGINE": "haystack.backends.simple_backend.SimpleEngine"}}
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {}}]
AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.ModelBackend"]
WAGTAIL_SITE_NAME, WAGTAILADMIN_BASE_URL, MEDIA_ROOT = "shop", "http://localhost", "/nonexistent"
STATIC_URL = "/static/"
WAGTAILSEARCH_BACKENDS = {"default": {"BACKEND": "wagtail.search.backends.database"}}
